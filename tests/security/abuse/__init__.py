"""`draftwood bench abuse`: what one caller's attack costs the others."""
