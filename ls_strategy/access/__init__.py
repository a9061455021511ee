"""Give users access to a running fit: full weights and gradients unit by unit, and the memory of the device."""
