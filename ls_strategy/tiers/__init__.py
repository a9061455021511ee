"""Where model states are stored between uses: on the device, in host memory, or on NVMe."""
