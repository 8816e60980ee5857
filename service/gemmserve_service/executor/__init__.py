"""Executors: products run on devices, `local` in worker processes of this machine; `port` is what others implement."""
