"""A reward that differs between samples, so that every group has a gradient and both arms train on all of it."""


def letters(prompts, completions, **columns) -> list[float]:
    """The share of the alphabet that the answer uses; takes plain texts and chat messages."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [len({x for x in t.lower() if "a" <= x <= "z"}) / 26 + len(t) / 10_000 for t in texts]
