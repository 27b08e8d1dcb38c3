"""The search for the cheapest formats of a training that keep its quality."""
