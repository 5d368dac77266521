"""What the papers of our methods claim, measured here."""
