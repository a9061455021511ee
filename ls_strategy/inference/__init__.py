"""Running trained models: generation with a cache, divided, quantised and streamed weights."""
