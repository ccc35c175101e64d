"""What are we talking about? Frozen values, events, errors and protocols; imports nothing of Longtail."""
