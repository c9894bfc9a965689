"""transformers' batch processor, one call at a time, without its thread: steps can be cancelled, or die, in between."""

import contextlib

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching import continuous_api, input_outputs, model_runner
from transformers.generation.continuous_batching.requests import RequestState

from integrations.transformers.batching import batching_config, scheduled_requests


class Driver:
    """A processor of a model's; `step` prepares, computes and updates as transformers' loop does, async or not."""

    def __init__(self, model, num_blocks, *, samples=1, do_sample=False, **more):
        config = GenerationConfig(max_new_tokens=8, do_sample=do_sample, eos_token_id=-1, pad_token_id=0)
        config.num_return_sequences = samples  # transformers would refuse several greedy ones, which tests compare
        given = batching_config(num_blocks, model, **more)
        self.model, self.samples = model, samples
        self.manager = model.init_continuous_batching(config, continuous_batching_config=given)
        self.processor = self.manager._create_batch_processor()
        self.cache = self.processor.cache
        self.is_async = self.processor.use_async_batching
        self.answers, self.logprobs, self.failed = {}, {}, set()
        self.num_computed = 0
        self._in_flight = False

    def add(self, request_id, prompt, new=8):
        state = RequestState(request_id, list(prompt), max_new_tokens=new, num_children=self.samples - 1)
        state._eos_token_ids = set()
        self.manager.input_queue.put(state)

    def cancel(self, request_id):
        self.manager.cancel_queue.put(request_id)

    def step(self, die=False):
        """Run a step; returns whether there was anything to do. `die`: raise RuntimeError in the forward pass."""
        ready = self.processor.prepare_next_batch()
        if ready:
            self.num_computed += sum(request.query_length for request in scheduled_requests(self.processor))
            with torch.no_grad():
                if die:
                    raise RuntimeError("the step died")
                self.processor._generation_step(self.model)
            if self.is_async and not self._in_flight:
                self._in_flight = True
                return True
            self.processor.update_batch()
        elif self._in_flight:  # the last step's tokens
            ios = self.processor.inputs_and_outputs
            ios.current_pair = 1 - ios.current_pair
            self.processor.update_batch()
            ios.current_pair = 1 - ios.current_pair
            self._in_flight = False
            ready = True
        self.collect()
        return ready

    def collect(self):
        queue = self.manager.output_router.output_queue
        while not queue.empty():
            output = queue.get()
            if output.error is None:
                self.answers[output.request_id] = output.generated_tokens
                self.logprobs[output.request_id] = (output.prompt_ids, output.generated_tokens, output.logprobs)
            else:
                self.failed.add(output.request_id)

    def fail(self):
        """What transformers' loop does when a step has died, and what the next loop begins with."""
        self.processor.fail_all_requests(RuntimeError("the step died"))
        self.collect()
        self.processor.reset()
        self._in_flight = False

    def finish(self):
        while self.processor.has_pending_requests() or not self.manager.input_queue.empty() or self._in_flight:
            self.step()
        self.step()
        return self.answers


class _Nothing:
    def __init__(self, *_args, **_kwargs):
        pass

    def __getattr__(self, _name):
        return lambda *_args, **_kwargs: None


class _Covered:
    """A module in which some names are replaced."""

    def __init__(self, module, **names):
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name):
        return getattr(self._module, name)


@contextlib.contextmanager
def async_on_cpu(monkeypatch):
    """Let asynchronous batching run on a CPU: steps are computed at once, and updated one step late all the same."""
    no_stream = {"Event": _Nothing, "Stream": _Nothing, "stream": lambda _stream: contextlib.nullcontext()}
    with monkeypatch.context() as patch:
        if hasattr(input_outputs, "create_device_stream"):
            patch.setattr(input_outputs.ContinuousBatchingAsyncIOs, "_supported_device_types", ("cpu",))
            patch.setattr(input_outputs, "create_device_stream", _Nothing)
            patch.setattr(input_outputs, "stream_context", no_stream["stream"])
            patch.setattr(input_outputs, "torch", _Covered(torch, Event=_Nothing))
        else:  # up to transformers 5.18, which knows CUDA's streams only
            cuda = _Covered(torch.cuda, is_available=lambda: True, **no_stream)
            for module in (input_outputs, model_runner, continuous_api):
                patch.setattr(module, "torch", _Covered(torch, cuda=cuda))
        yield
