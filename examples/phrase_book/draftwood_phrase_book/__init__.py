"""A Draftwood strategy that drafts the phrases of a fixed book: greetings, disclaimers and other boilerplate."""

from draftwood_phrase_book.book import BookError, PhraseBook, read_book
from draftwood_phrase_book.strategy import PhraseBookStrategy

__all__ = ["BookError", "PhraseBook", "PhraseBookStrategy", "read_book"]
