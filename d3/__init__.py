"""D3: does the first request differ, and why? A controlled experiment on a language-model engine."""

__version__ = "0.1.0"
