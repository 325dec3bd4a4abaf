"""The NVMe tier: engines that move bytes, and the layout of the store file."""
