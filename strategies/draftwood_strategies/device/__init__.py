"""The trie's drafts on a GPU: memories, searches and learning beside the model's weights (see `trie.DeviceTrie`)."""
