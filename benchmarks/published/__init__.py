"""Programs of published packages, as their documentation shows them. Only the strategy's name is an argument."""
