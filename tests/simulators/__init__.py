"""Software models of GPUs, for tests and for pricing kernels without the hardware. See README.md."""
