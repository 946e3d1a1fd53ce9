"""The ServerApp: FedAvg, with the global model's test accuracy after every round."""

import json

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedeas_flwr import with_fedeas
from myapp.task import load_central_testset, new_model, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds; append each round's accuracy to the file `results`, if it is set, as one JSON line."""
    config = context.run_config
    torch.manual_seed(config["seed"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, testloader = new_model(config), load_central_testset(config)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = test(model, testloader, device)
        if config["results"]:
            with open(config["results"], "a") as file:
                file.write(json.dumps({"round": server_round, "accuracy": accuracy, "loss": loss}) + "\n")
        return MetricRecord({"accuracy": accuracy, "loss": loss})

    strategy = FedAvg(fraction_evaluate=config["fraction-evaluate"])
    strategy = with_fedeas(strategy, beta=config["beta"])
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        train_config=ConfigRecord({"lr": config["learning-rate"]}),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=evaluate,
    )
