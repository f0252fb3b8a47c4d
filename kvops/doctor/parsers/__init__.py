"""Pure functions from what a tool printed to what it said. They raise `ParseError` and nothing else."""


class ParseError(ValueError):
    """The text is not what the tool is documented to print."""
