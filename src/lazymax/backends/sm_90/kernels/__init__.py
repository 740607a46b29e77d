"""Device code for Hopper's warpgroup products, in Gluon."""
