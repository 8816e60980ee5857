"""Products of complex64 whose float16 planes are made by the kernel that multiplies them."""
