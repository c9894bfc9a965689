"""How answers are said: OpenAI's Chat Completions, Anthropic's Messages, OpenAI's Responses.

A body of another protocol is translated to one of a chat, which is read and checked as any chat is. A voice then says
the answer in the protocol's own words.
"""
