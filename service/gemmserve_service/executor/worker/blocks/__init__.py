"""Large products on one device, block after block: parts of operands and results, panels that stay on the device."""
