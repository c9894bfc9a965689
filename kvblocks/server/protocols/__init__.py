"""The protocols of chats: OpenAI's Chat Completions, Anthropic's Messages, and OpenAI's Responses.

A body of another protocol is translated to that of a chat, which is read and checked like any chat. A `Voice` then
writes the answer in the protocol's own format.
"""
