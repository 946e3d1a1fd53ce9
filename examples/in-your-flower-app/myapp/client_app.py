"""The ClientApp: train and evaluate on one partition."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader

from fedeas_flwr import Augmenter
from myapp.task import load_data, new_model
from myapp.task import test as test_fn
from myapp.task import train as train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the received model on this client's partition."""
    config, partition_id = context.run_config, context.node_config["partition-id"]
    torch.manual_seed(1_000_000 * config["seed"] + 1_000 * msg.content["config"]["server-round"] + partition_id)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = new_model(config)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())

    trainloader, _ = load_data(partition_id, context.node_config["num-partitions"], config)
    fedeas = Augmenter(config["generator"], config["dataset"], seed=config["seed"])
    augmented = fedeas.augment(trainloader.dataset, msg, context)
    loader = DataLoader(augmented, config["batch-size"], shuffle=True)
    loss = train_fn(model, loader, config["local-epochs"], msg.content["config"]["lr"], device)

    metrics = MetricRecord({"train_loss": loss, "num-examples": len(trainloader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the received model on this client's test images."""
    config, partition_id = context.run_config, context.node_config["partition-id"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = new_model(config)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())

    _, testloader = load_data(partition_id, context.node_config["num-partitions"], config)
    loss, accuracy = test_fn(model, testloader, device)

    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(testloader.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
