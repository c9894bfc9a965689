"""Parts of bodies: messages of chats, forms of answers, sampling, and fields that only other servers have."""
