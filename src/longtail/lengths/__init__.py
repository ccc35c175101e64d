"""How long will it be? Rankers, their training and evaluation, and beliefs about the rest of a live sequence."""
