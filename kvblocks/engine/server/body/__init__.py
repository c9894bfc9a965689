"""Parts of bodies: messages of chats, and the fields that other servers have and this one doesn't."""
