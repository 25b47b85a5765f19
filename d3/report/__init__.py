"""A certificate for people: Markdown, one HTML page, the terminal's table, and the draft of a public comment.

Everything shown is in the certificate or in the boots' files beside it.
"""

import logging

# Before matplotlib is imported: it tells every user that it builds a font cache, and where it may not keep it.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
