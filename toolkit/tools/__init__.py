"""Programs around training, a folder or file each. They import the core."""
