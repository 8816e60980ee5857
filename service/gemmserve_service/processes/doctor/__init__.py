"""`gemmserve doctor`: what this machine is, which limits it sets, and what keeps the service from its best."""
