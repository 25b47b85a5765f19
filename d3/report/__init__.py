"""A certificate for people: Markdown, one HTML page, the terminal's table, and the draft of a public comment.

Everything shown is in the certificate or in the boots' files beside it.
"""
