"""The decoder, dense or mixture of experts: its forward pass, kernels, sizes and sampling."""
