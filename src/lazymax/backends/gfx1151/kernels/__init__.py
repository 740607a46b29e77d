"""Device code for RDNA 3's WMMA, in Gluon."""
