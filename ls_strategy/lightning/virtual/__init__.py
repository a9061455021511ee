"""Virtual ranks: their data, random numbers, logs and steps, on as many ranks as there are."""
