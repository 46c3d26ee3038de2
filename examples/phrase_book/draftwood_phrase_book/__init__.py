"""A Draftwood strategy that drafts the phrases of a fixed book: greetings, disclaimers, whatever is said verbatim."""

from draftwood_phrase_book.book import BookError, PhraseBook, read_book
from draftwood_phrase_book.strategy import PhraseBookStrategy

__all__ = ["BookError", "PhraseBook", "PhraseBookStrategy", "read_book"]
