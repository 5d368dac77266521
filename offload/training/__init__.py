"""What is found out about a model by its own answers to made questions."""
