"""How do jobs come and go? `longtail up`, and what talks to it."""
