"""The families of models that a trace must take, small: for scripts and for jobs."""

import torch
import torch.nn.functional as F
from torch import nn

TOKENS, VOCABULARY = 16, 96


def _transformers():
    import transformers

    return transformers


_TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_LLAMA = {**_TEXT, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64}


def bert():
    t = _transformers()
    return t.BertForMaskedLM(t.BertConfig(**_TEXT, vocab_size=VOCABULARY, max_position_embeddings=64))


def gpt2():
    t = _transformers()
    config = t.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=VOCABULARY)
    config.bos_token_id = config.eos_token_id = 0
    return t.GPT2LMHeadModel(config)


def llama():
    t = _transformers()
    return t.LlamaForCausalLM(t.LlamaConfig(**_LLAMA))


def mistral():
    t = _transformers()
    return t.MistralForCausalLM(t.MistralConfig(**_LLAMA, sliding_window=8))


def mixtral():
    t = _transformers()
    return t.MixtralForCausalLM(t.MixtralConfig(**_LLAMA, num_local_experts=4))


def t5():
    t = _transformers()
    config = t.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCABULARY)
    config.decoder_start_token_id = 0
    return t.T5ForConditionalGeneration(config)


def vit():
    t = _transformers()
    return t.ViTForImageClassification(t.ViTConfig(**_TEXT, image_size=16, patch_size=4))


def convnext():
    t = _transformers()
    config = t.ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 2], num_stages=2, drop_path_rate=0.1)
    return t.ConvNextForImageClassification(config)


def resnet():
    t = _transformers()
    config = t.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
    return t.ResNetForImageClassification(config)


def whisper():
    t = _transformers()
    config = t.WhisperConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        vocab_size=VOCABULARY,
        max_source_positions=16,
        max_target_positions=32,
        num_mel_bins=8,
        encoder_layerdrop=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return t.WhisperForConditionalGeneration(config)


def unet():
    import diffusers

    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=4,
        norm_num_groups=8,
    )


class Seq2Seq(nn.Module):
    """A transformer of torch's own, with both masks that it makes by itself."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.transformer = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.transformer(x, x, tgt_mask=mask, src_key_padding_mask=ids == 0, tgt_is_causal=True))


class Recurrent(nn.Module):
    """Both kinds of recurrent layers, stacked and in both directions, behind a bag of embeddings."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True, dropout=0.1)
        self.gru = nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids):
        x = self.bag(ids.reshape(-1, 4)).view(ids.shape[0], -1, 16)
        return self.head(self.gru(self.lstm(x)[0])[0])


class Clamped(torch.autograd.Function):
    """An autograd function of a user's own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1)


class Convolutions(nn.Module):
    """Normalised convolutions with an autograd function of its own, in channels_last."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.last = nn.Conv2d(16, 8, 3)

    def forward(self, x):
        x = x.contiguous(memory_format=torch.channels_last)
        return self.last(Clamped.apply(self.norm(self.first(x)))).mean((2, 3))


def lora():
    import peft

    return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


def tokens(n):
    return {"input_ids": torch.randint(1, VOCABULARY, (n, TOKENS))}


def images(n, size=16):
    return {"pixel_values": torch.zeros(n, 3, size, size), "labels": torch.zeros(n, dtype=torch.long)}


def speech(n):
    return {"input_features": torch.zeros(n, 8, 32), "labels": torch.ones(n, 8, dtype=torch.long)}


def latents(n):
    return {"sample": torch.randn(n, 4, 8, 8), "text": torch.randn(n, 5, 16), "time": torch.randint(0, 1000, (n,))}


def _own_loss(model, batch):
    return model(**batch).loss


def _next_token(model, batch):
    return model(**batch, labels=batch["input_ids"]).loss


def _plain(model, batch):
    output = model(batch["input_ids"])
    return F.cross_entropy(output.flatten(0, 1).float(), batch["input_ids"].flatten()[: output.flatten(0, 1).shape[0]])


def _classes(model, batch):
    return F.cross_entropy(model(batch["pixel_values"]).float(), batch["labels"])


def _noise(model, batch):
    noise = torch.randn_like(batch["sample"])
    return F.mse_loss(model(batch["sample"] + noise, batch["time"], batch["text"]).sample.float(), noise)


FAMILIES = {
    "bert": (bert, tokens, _next_token),
    "gpt2": (gpt2, tokens, _next_token),
    "llama": (llama, tokens, _next_token),
    "mistral": (mistral, tokens, _next_token),
    "mixtral": (mixtral, tokens, _next_token),
    "t5": (t5, tokens, _next_token),
    "vit": (vit, images, _own_loss),
    "convnext": (convnext, lambda n: images(n, 32), _own_loss),
    "resnet": (resnet, lambda n: images(n, 32), _own_loss),
    "whisper": (whisper, speech, _own_loss),
    "unet": (unet, latents, _noise),
    "nn.Transformer": (Seq2Seq, tokens, _plain),
    "recurrent": (Recurrent, tokens, _plain),
    "convolutions": (Convolutions, images, _classes),
    "lora": (lora, tokens, _next_token),
}
"Name to: model, batch of n samples, loss of a model and a batch."


def script(name, *, dtype=torch.bfloat16, scaled=False):
    """A training script as users write it: two micro-batches, autocast, scaler, clipping, schedule."""
    make_model, make_batch, loss_of = FAMILIES[name]

    def make_step():
        model = make_model().to("cuda").train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        scaler = torch.amp.GradScaler("cuda", enabled=scaled)
        data = [make_batch(2) for _ in range(2)]

        def step():
            optimizer.zero_grad()
            total = 0.0
            for host in data:
                batch = {key: value.cuda(non_blocking=True) for key, value in host.items()}
                with torch.autocast("cuda", dtype):
                    loss = loss_of(model, batch) / len(data)
                scaler.scale(loss).backward()
                total += loss.item()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            print(f"loss {total:.3f}")

        return step

    return make_step


def moved_whole(name):
    """The model alone, built for real: what its parameters and buffers are."""
    return FAMILIES[name][0]()
