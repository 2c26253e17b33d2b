"""Operations on a whole store: copy it, examine it, tidy it.

Store URLs come in; a copy that is verified, or a list of findings, goes out. Only the command
line and `app` import it.
"""
