"""What happens while forward and backward run: parameters are gathered, gradients are averaged."""
