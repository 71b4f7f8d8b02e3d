"""Residual streams without rewrites, the baselines of any claim about them. All are plain PyTorch,
but for the convolution of `additive-conv`, which is a token read."""
