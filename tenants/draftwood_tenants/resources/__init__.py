"""Named resources that all servers share: bytes with a revision, in the server that also has the memories."""
