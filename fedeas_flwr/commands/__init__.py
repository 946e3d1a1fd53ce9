"""The commands of `fedeas` that have a file of their own, and what they share."""
