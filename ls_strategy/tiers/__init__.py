"""Where model states rest between uses: on the device, in host memory, on a drive."""
