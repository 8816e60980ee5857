"""Float16 planes: scaling, splitting, balancing, fallback, and products of them."""
