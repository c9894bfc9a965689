"""What requests ask of answers beside their text, and how it looks: log probabilities, echoes, how tokens are drawn.

`sampling_fields` reads what is asked, `logprobs` writes OpenAI's JSON.
"""
