"""A real, unmodified SGLang on a machine with no GPU: how it is installed, fed and started."""
