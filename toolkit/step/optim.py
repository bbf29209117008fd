"""Parameter groups, their gradients, and the optimizer."""

import inspect
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import compress

import torch
from torch import Tensor, nn

from toolkit.base.distributed import all_reduce, world
from toolkit.base.errors import BadInput

_OF_PARAMETERS = ("params", "param_names")  # entries of a group with one item for each parameter


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    backbone_lr: float | None = None,
    no_decay_on_norm_and_bias: bool = False,
    bias_lr_factor: float = 1.0,
    bias_weight_decay: float | None = None,
    multipliers: Mapping[str, float] | None = None,
    slow_prefixes: Sequence[str] = (),
    slow_factor: float = 0.1,
    layer_decay: float = 1.0,
) -> list[dict]:
    """Return the groups of an optimizer: every parameter that requires a gradient, in exactly one.

    Args:
        model: the unwrapped model; only its parameters are in the groups.
        lr, weight_decay: of parameters without a special rule below. Several factors on one rate are multiplied.
        backbone_lr: learning rate of the backbone: parameters below a "backbone", or transformers' "_backbone".
        no_decay_on_norm_and_bias: no weight decay on parameters of norm layers (found by the type of the module, not by
            a pattern on names) and on biases.
        bias_lr_factor: factor on the learning rate of biases, those of norm layers too.
        bias_weight_decay: weight decay of biases, also with the switch above; None: the rules above apply.
        multipliers: factor on the learning rate by prefix of the parameter name; the longest prefix counts.
        slow_prefixes: parameters below these, and below no prefix of `multipliers`, have the factor `slow_factor`.
        layer_decay: factor on the learning rate of a layer of the timm backbone for each layer between it and the parts
            above the backbone; see `layer_depths`.

    Returns:
        [{name, params, param_names, lr, weight_decay}], in the order of their first parameter. Names, for
        `train/lr/<name>`: "main" or "backbone", then "/no_decay", then "/bias" if biases have a factor or a decay of
        their own, then "/<prefix>" of a multiplier or of slow parameters, then "/layer-<depth>" with a layer decay.

    Raises:
        BadInput: a multiplier that matches no trained parameter, a slow prefix that matches none at all, a backbone
            rate or a layer decay without a backbone, no trained parameter.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    given = dict(multipliers or {})
    slow = dict.fromkeys(slow_prefixes, slow_factor)
    _check_prefixes(model, trained, given, slow, backbone_lr)
    kinds = _parameter_kinds(model, trained, weight_decay, no_decay_on_norm_and_bias, bias_lr_factor, bias_weight_decay)
    depths = layer_depths(model) if layer_decay != 1.0 else {}
    groups: dict[str, dict] = {}
    for name, parameter in trained:
        in_backbone = backbone_lr is not None and _in_backbone(name)
        group_name = "backbone" if in_backbone else "main"
        group_lr = backbone_lr if in_backbone else lr
        kind, kind_factor, decay = kinds[name]
        traits = [(kind, kind_factor), _of_longest_prefix(name, given, slow)]
        if name in depths:
            traits.append((f"/layer-{depths[name]}", layer_decay ** depths[name]))
        for suffix, factor in traits:
            group_name = group_name + suffix
            group_lr = group_lr * factor
        group = groups.setdefault(group_name, _empty_group(group_name, group_lr, decay))
        group["params"].append(parameter)
        group["param_names"].append(name)
    return list(groups.values())


def _empty_group(name: str, lr: float, weight_decay: float) -> dict:
    return {
        "name": name,
        "params": [],
        "param_names": [],
        "lr": lr,
        "weight_decay": weight_decay,
    }


def layer_depths(model: nn.Module) -> dict[str, int]:
    """Return, by name, in which layer each parameter of the model's timm backbones is, counted from the last layer (1).

    Layers are those of timm's `group_matcher`, which timm's own `layer_decay` uses too: each residual or transformer
    block is a layer, and the stem is one.

    Raises:
        BadInput: the model has no timm backbone, or one that does not define its layers.
    """
    depths = {}
    for prefix, module in model.named_modules():
        cfg = getattr(module, "pretrained_cfg", None)
        if not isinstance(cfg, dict) or "architecture" not in cfg:
            continue
        of_name = _timm_depths(cfg["architecture"])
        for name, _ in module.named_parameters():
            depth = of_name.get(_spelling(name))
            if depth is not None:
                full_name = f"{prefix}.{name}" if prefix else name
                depths[full_name] = depth
    if not depths:
        raise BadInput("optim.layer_decay: the detector has no timm backbone that names its layers; set it to 1")
    return depths


def _timm_depths(architecture: str) -> dict[str, int]:
    """Return the depths of the parameters of a timm model without its head, by `_spelling` of their names."""
    import timm  # takes seconds; most runs use no layer decay

    with torch.device("meta"):  # only the names are needed
        whole = timm.create_model(architecture)
    if not hasattr(whole, "group_matcher"):
        return {}
    matcher = whole.group_matcher(coarse=False)
    layers = timm.models.group_parameters(whole, matcher, reverse=True)
    head = max(layers.values())
    return {_spelling(name): head - layer for name, layer in layers.items() if layer < head}


def _spelling(name: str) -> str:
    """Return one spelling of a name for timm's models and extractors, which flatten "stages.1.0" to "stages_1.0"."""
    return name.removeprefix("model.").replace("_", ".")


def build_optimizer(
    name: str,
    groups: Iterable[dict],
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    betas: Sequence[float] = (0.9, 0.999),
    fused: bool | None = None,
    embeddings: Iterable[nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """Build the optimizer over `parameter_groups`.

    Args:
        name: "adamw", "adam" (L2 penalty in the gradient), "sgd" or "muon" (`MuonAndAdamW`).
        groups: as of `parameter_groups`.
        betas: of adamw and adam, and of the AdamW in muon.
        momentum, nesterov: of sgd; with nesterov the update is computed one step of the momentum ahead.
        embeddings: matrices that muon updates by AdamW.
        fused: whether one kernel makes the whole update; None: yes if all parameters are on CPU or CUDA, else torch's
            own choice. On a CPU the fused update is five times faster than torch's default; on CUDA it is one launch
            instead of dozens. Both are deterministic.

    Raises:
        BadInput: an unknown name, nesterov without momentum, betas that are not two numbers from 0 to below 1, muon
            without matrices.
    """
    if name == "sgd" and nesterov and momentum <= 0:
        wanted = "expected a momentum above 0, such as 0.9, or optim.nesterov false"
        raise BadInput(f"optim.nesterov is true, but optim.momentum is {momentum}: {wanted}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise BadInput(f"optim.betas is {list(betas)}; expected two numbers from 0 to below 1, such as [0.9, 0.999]")
    groups = list(groups)
    betas = tuple(betas)
    if fused is None:
        devices = {parameter.device.type for parameter in parameters_of(groups)}
        fused = devices <= {"cpu", "cuda"} or None
    if name == "adamw":
        return AdamW(groups, betas=betas, fused=fused)
    if name == "muon":
        return MuonAndAdamW(groups, betas, fused, {id(parameter) for parameter in embeddings})
    if name == "adam":
        return Adam(groups, betas=betas, fused=fused)
    if name == "sgd":
        sgd = SGD(
            groups,
            lr=groups[0]["lr"],
            momentum=momentum,
            nesterov=nesterov,
            fused=fused,
        )
        # The fused update allocates these without content, and fills them in its first step: if the scaler of float16
        # skips that step, it continues with arbitrary content of the memory.
        if momentum:
            for parameter in parameters_of(sgd.param_groups):
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return sgd
    raise BadInput(f"optim.name is {name!r}; expected adamw, adam, sgd or muon")


def parameters_of(groups: Iterable[dict]) -> Iterator[nn.Parameter]:
    """Yield the parameters of all groups, in order."""
    for group in groups:
        yield from group["params"]


class _WithoutCompiler(torch.optim.Optimizer):
    """An optimizer that does not import torch's compiler, which takes 0.9 s and 100 MB of each process.

    torch wraps these methods so that its compiler leaves them alone, and imports the compiler for it when the first of
    them is called. Here they are the same functions without the wrapping: optimizers are not compiled, `optim.compile`
    compiles parts of the model.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(_WithoutCompiler, torch.optim.AdamW):
    """torch's AdamW, which does not import torch's compiler here."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Adam(_WithoutCompiler, torch.optim.Adam):
    """torch's Adam, which does not import torch's compiler here."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class SGD(_WithoutCompiler, torch.optim.SGD):
    """torch's SGD, which does not import torch's compiler here."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's Muon (Jordan et al. 2024) for matrices, and its AdamW for all other parameters, as one optimizer.

    The matrices are in groups `<name>/muon`. The updates of Muon are scaled to the size of AdamW's (Liu et al. 2025,
    arXiv 2502.16982), so that one learning rate and weight decay suit both.

    groups: as of `parameter_groups`. embeddings: ids (by `id`) of matrices that AdamW updates.

    Raises BadInput: the groups have no matrices, or torch is older than 2.9.
    """

    def __init__(self, groups: Sequence[dict], betas: Sequence[float], fused: bool | None, embeddings: Container[int]):
        if not hasattr(torch.optim, "Muon"):
            raise BadInput(f"optim.name muon: torch {torch.__version__} has no Muon; install torch 2.9 or newer")
        of_muon = []
        of_adamw = []
        for group in groups:
            is_matrix = [p.ndim == 2 and id(p) not in embeddings for p in group["params"]]
            matrices = _selected(group, is_matrix)
            if matrices["params"]:
                of_muon.append({**matrices, "name": f"{group['name']}/muon"})
            others = _selected(group, [not chosen for chosen in is_matrix])
            if others["params"]:
                of_adamw.append(others)
        if not of_muon:
            raise BadInput("optim.name muon: the detector trains no matrices, for which Muon is; choose adamw or sgd")
        self.parts = {"muon": torch.optim.Muon(of_muon, lr=1e-3, adjust_lr_fn="match_rms_adamw")}
        if of_adamw:
            self.parts["adamw"] = torch.optim.AdamW(of_adamw, betas=betas, fused=fused)
        with_rule = []
        for rule, part in self.parts.items():
            with_rule += [{**group, "rule": rule} for group in part.param_groups]
        super().__init__(with_rule, {})

    def __getstate__(self) -> dict:
        """Return the state for a copy; torch's own leaves out the parts."""
        return {**super().__getstate__(), "parts": self.parts}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Make one update by both rules."""
        for rule, part in self.parts.items():
            part.param_groups = [group for group in self.param_groups if group["rule"] == rule]
            part.state = self.state
            part.step()


def _selected(group: dict, chosen: Sequence[bool]) -> dict:
    """Return the group with the chosen parameters only."""
    part = dict(group)
    for key in _OF_PARAMETERS:
        part[key] = list(compress(group[key], chosen))
    return part


def load_state(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Load an optimizer state, and give each state tensor the memory layout (strides) of its parameter.

    A fused update goes through a parameter and its state in memory order, whatever their strides. State tensors with
    another layout, such as those saved on other hardware, would be applied to the wrong entries.
    """
    optimizer.load_state_dict(state)
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            of_entries = isinstance(value, Tensor) and value.shape == parameter.shape
            if of_entries and value.stride() != parameter.stride():
                in_layout = torch.empty_like(parameter, dtype=value.dtype)
                kept[name] = in_layout.copy_(value)


def gradient_table(
    named_parameters: Iterable[tuple[str, nn.Parameter]], max_norm: float = 0.0, top: int | None = None
) -> str:
    """Format lines of text: total norm and clipping factor, then name, norm and shape of the `top` largest gradients.

    max_norm: the norm that gradients will be clipped to, for the factor; 0: they are not clipped, and the factor is
    left out. top: None: all gradients. Call this before clipping. The host waits for the device once.
    """
    named = [(name, p.grad) for name, p in named_parameters if p.grad is not None]
    if not named:
        return "---Total norm 0.00000: no parameter has a gradient---"
    norms = torch.stack([gradient.detach().float().norm() for _, gradient in named])
    total_norm = norms.norm()
    *values, total = torch.cat([norms, total_norm[None]]).tolist()
    head = f"---Total norm {total:.5f}"
    if max_norm:
        factor = max_norm / (total + 1e-6)
        head += f" clip coef {factor:.5f}"
    largest_first = sorted(zip(values, named, strict=True), key=lambda row: -row[0])
    lines = [f"{head}-----------------"]
    for norm, (name, gradient) in largest_first[:top]:
        lines.append(f"{name:<50s}: {norm:.5f}, ({gradient.shape})")
    lines.append("-------------------------------")
    return "\n".join(lines)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the total L2 norm of the gradients, 0-dim on their device; NaN or infinite when any entry is."""
    return total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])


@torch.no_grad()
def total_norm(tensors: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all entries together, 0-dim: `torch.nn.utils.get_total_norm` to the bit.

    That makes three Python calls for each tensor. Here there are none, unless devices or dtypes differ.
    """
    kinds = {(tensor.device, tensor.dtype) for tensor in tensors}
    if len(kinds) != 1:
        return torch.nn.utils.get_total_norm(tensors, norm_type)
    norms = torch._foreach_norm(tensors, norm_type)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def gradient_norms_of_groups(param_groups: Iterable[Mapping]) -> dict[str, Tensor]:
    """Return `gradient_norm` of each group of an optimizer as `grad_norm/<name of the group>`."""
    norms = {}
    for group in param_groups:
        norms[f"grad_norm/{group['name']}"] = gradient_norm(group["params"])
    return norms


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Average the gradients of parameters outside DDP over the ranks, after the last backward of a step; a collective.

    A rank without a gradient counts as zeros. With one process, or without parameters, nothing is done.
    """
    if not parameters or world()[1] == 1:
        return
    flat = []
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        flat.append(gradient.flatten())
    averaged = all_reduce(torch.cat(flat), "mean")
    parts = averaged.split([parameter.numel() for parameter in parameters])
    for parameter, gradient in zip(parameters, parts, strict=True):
        parameter.grad = gradient.view_as(parameter).clone()


def drop_gradients(model: nn.Module) -> None:
    """Set the gradients of all parameters of the model to None, also of parameters that no optimizer has."""
    for parameter in model.parameters():
        parameter.grad = None


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm layer: of torch, torchvision, timm or transformers, frozen or not.

    Such a module is found by "Norm" in the name of its class, or the class InplaceAbn. Containers such as timm's
    ConvNormAct count as norm layers too, but have no parameters of their own.
    """
    names = [cls.__name__ for cls in type(module).__mro__]
    return any("Norm" in name or name == "InplaceAbn" for name in names)


def _norms_and_biases(model: nn.Module) -> set[str]:
    names = set()
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if _is_bias(leaf, parameter) or is_norm(module):
                names.add(f"{module_name}.{leaf}" if module_name else leaf)
    return names


def _is_bias(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a bias.

    in_proj_bias of attention is one; relative_position_bias_table, a 2-d table, and freq_bias.weight are not.
    """
    leaf = name.rpartition(".")[2]
    return parameter.ndim == 1 and (leaf == "bias" or leaf.endswith("_bias"))


def _parameter_kinds(
    model: nn.Module,
    trained: list[tuple[str, nn.Parameter]],
    weight_decay: float,
    no_decay_on_norm_and_bias: bool,
    bias_lr_factor: float,
    bias_weight_decay: float | None,
) -> dict[str, tuple[str, float, float]]:
    """Return by parameter name the suffix of its group name, its factor on the rate, and its weight decay."""
    undecayed = _norms_and_biases(model) if no_decay_on_norm_and_bias else set()
    apart = bias_lr_factor != 1.0 or bias_weight_decay is not None
    kinds = {}
    for name, parameter in trained:
        is_undecayed = name in undecayed
        suffix = "/no_decay" if is_undecayed else ""
        factor = 1.0
        decay = 0.0 if is_undecayed else weight_decay
        if apart and _is_bias(name, parameter):
            if bias_weight_decay is not None:
                suffix = ""
                decay = bias_weight_decay
            suffix = f"{suffix}/bias"
            factor = bias_lr_factor
        kinds[name] = suffix, factor, decay
    return kinds


def _of_longest_prefix(name: str, *of_prefixes: Mapping[str, float]) -> tuple[str, float]:
    """Return "/<prefix>" and its factor: the longest prefix in the first mapping that has one; "" and 1 if none has."""
    for factors in of_prefixes:
        prefixes = [prefix for prefix in factors if is_below(name, prefix)]
        prefix = max(prefixes, key=len, default=None)
        if prefix:
            return f"/{prefix}", factors[prefix]
    return "", 1.0


def _in_backbone(name: str) -> bool:
    return not {"backbone", "_backbone"}.isdisjoint(name.split("."))


def is_below(name: str, prefix: str) -> bool:
    """Return whether the parameter or module `name` is called `prefix`, or is inside of the module `prefix`."""
    return name == prefix or name.startswith(f"{prefix}.")


def _check_prefixes(
    model: nn.Module,
    trained: list[tuple[str, nn.Parameter]],
    multipliers: Mapping[str, float],
    slow: Mapping[str, float],
    backbone_lr: float | None,
) -> None:
    names = [name for name, _ in trained]
    every = [name for name, _ in model.named_parameters()]
    prefixes = set()  # of up to three parts
    for name in names:
        parts = name.split(".")
        prefixes |= {".".join(parts[:depth]) for depth in (1, 2, 3)}
    existing = ", ".join(sorted(prefixes))
    problems = []
    for prefix in multipliers:
        if not any(is_below(name, prefix) for name in names):
            problems.append(
                f"optim.lr_multipliers.{prefix}: no trained parameter has this prefix; some that exist: {existing}"
            )
    for prefix in slow:
        if not any(is_below(name, prefix) for name in every):
            problems.append(
                f"optim.slow_prefixes: no parameter, trained or frozen, has the prefix {prefix}; some that exist: "
                f"{existing}"
            )
    if backbone_lr is not None and not any(map(_in_backbone, names)):
        problems.append(f"optim.backbone_lr: no trained parameter has a part named backbone; prefixes: {existing}")
    if not trained:
        problems.append("no parameter requires a gradient: everything is frozen")
    if problems:
        raise BadInput(problems)
