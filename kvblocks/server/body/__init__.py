"""Parts of request bodies: chat messages, forms of answers, sampling, and fields that only other servers have."""
