"""The seams (`api`), the URLs that open them (`open`), and one folder for each engine.

Keys, versions, batches and items come in; an engine keeps them and says what became of each
write. Rooms above see the seams only; engines do not import each other.
"""
