"""Device code for Blackwell's tensor memory, in Gluon."""
