"""Row energies of many layers at once: the plain definition, and fused GPU code held against it."""
