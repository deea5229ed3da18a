"""Tables, figures and pages; nothing here computes a result."""
