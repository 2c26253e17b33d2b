"""The same verbs for asyncio."""
