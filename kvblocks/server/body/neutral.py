"""Fields that clients of OpenAI, vLLM and SGLang send, and that this server doesn't have.

Many clients and routers send all fields that they know, with values that ask for nothing. Such values are accepted. Any
other value would change the answer, so it is refused, and the error names the field.
"""

TOLD = {
    "reasoning_effort": "this server doesn't tell reasoning from answers; chat_template_kwargs may turn it off",
    "verbosity": "this server's models don't know it; max_completion_tokens limits an answer",
}
"""Fields that OpenAI's clients send by default, with values that this server can't honor.

The answer's `warnings` name them.
"""

Refused = dict[str, tuple[tuple[object, ...], str]]
"""For each field name, the values that ask for nothing, and why other values are refused."""

WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_retention"),
    *("session_id", "truncation_side"),
)
"""Fields that clients send and that no answer depends on."""

_NO_LOGPROBS = "this server returns log probabilities by logprobs, top_logprobs and echo"
_NO_REASONING = "this server doesn't tell reasoning from answers"
_NO_BEAMS = "this server has no beam search"
_NO_STOP_TEXT = "an answer's text ends before what stops it"
_NO_CONSTRAINTS = "this server takes response_format or structured_outputs"
_NO_CHOICE = "this server chooses among all tokens"
_TEXT_ONLY = "this server reads and generates text"
_NO_TRANSFER = "this server computes and generates by itself"

REFUSED: Refused = {
    "prompt_logprobs": ((), _NO_LOGPROBS),
    "logprob_token_ids": (([],), _NO_LOGPROBS),
    "return_tokens_as_token_ids": ((False,), _NO_LOGPROBS),
    "suffix": (("",), "this server doesn't fill in the middle"),
    "functions": (([],), "this server takes tools"),
    "function_call": (("none", "auto"), "this server takes tool_choice"),
    "regex": ((), _NO_CONSTRAINTS),
    "ebnf": ((), _NO_CONSTRAINTS),
    "json_schema": ((), _NO_CONSTRAINTS),
    "allowed_token_ids": ((), _NO_CHOICE),
    "bad_words": (([],), _NO_CHOICE),
    "custom_logit_processor": ((), _NO_CHOICE),
    "modalities": ((["text"],), _TEXT_ONLY),
    "audio": ((), _TEXT_ONLY),
    "mm_processor_kwargs": (({},), _TEXT_ONLY),
    "media_io_kwargs": (({},), _TEXT_ONLY),
    "prompt_embeds": ((), _TEXT_ONLY),
    "prediction": ((), "this server has no predicted outputs"),
    "web_search_options": ((), "this server searches nothing"),
    "thinking_token_budget": ((-1,), _NO_REASONING),
    "separate_reasoning": ((True, False), _NO_REASONING),
    "stream_reasoning": ((True, False), _NO_REASONING),
    "include_reasoning": ((True, False), _NO_REASONING),
    "use_beam_search": ((False,), _NO_BEAMS),
    "length_penalty": ((1, 1.0), _NO_BEAMS),
    "include_stop_str_in_output": ((False,), _NO_STOP_TEXT),
    "no_stop_trim": ((False,), _NO_STOP_TEXT),
    "truncate_prompt_tokens": ((), "this server takes a prompt whole or not at all"),
    "add_generation_prompt": ((True,), "this server lets the model answer"),
    "continue_final_message": ((False,), "this server lets the model begin a message of its own"),
    "chat_template": ((), "this server uses the model's own"),
    "documents": (([],), "this server puts no documents in prompts"),
    "lora_path": ((), "this server has one model"),
    "session_params": (({},), "this server has no sessions"),
    "kv_transfer_params": (({},), _NO_TRANSFER),
    "ec_transfer_params": (({},), _NO_TRANSFER),
    "return_hidden_states": ((False,), "this server returns no hidden states"),
    "return_token_offsets": ((False,), "this server returns no offsets"),
    "return_prompt_text": ((False,), "this server doesn't repeat prompts"),
    "repetition_detection": ((), "this server ends no answer for repeating itself"),
    "stream_interval": ((1,), "this server sends each token as it comes"),
    "watermarking": ((False,), "this server has no watermarks"),
    "vllm_xargs": (({},), "this server has no extensions"),
}
