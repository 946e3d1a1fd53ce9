"""The model, its training and its data: digits or Fashion-MNIST in Dirichlet partitions."""

from functools import lru_cache

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import Compose, Normalize, ToTensor

from fedeas_flwr import dirichlet_partition
from fedeas_flwr.data.datasets import open_dataset


class Net(nn.Module):
    """Two convolutions and two linear layers, for grey images of size x size pixels."""

    def __init__(self, size):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(32 * (size // 4) ** 2, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


class Images(Dataset):
    """Images and labels in memory, like the datasets of torchvision."""

    transform = Compose([ToTensor(), Normalize((0.5,), (0.5,))])

    def __init__(self, images, targets):
        self.images, self.targets = images, targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.transform(self.images[index]), int(self.targets[index])


@lru_cache
def open_data(name, data_dir):
    return open_dataset(name, data_dir)


@lru_cache
def partition(name, data_dir, num_partitions, alpha, seed):
    labels = open_data(name, data_dir).y_train
    return dirichlet_partition(labels, num_partitions, alpha, seed, test_fraction=0.2)


def new_model(config):
    return Net(open_data(config["dataset"], config["data-dir"]).x_train.shape[1])


def load_data(partition_id, num_partitions, config):
    """Return the train and test loaders of one partition."""
    data = open_data(config["dataset"], config["data-dir"])
    parts = partition(config["dataset"], config["data-dir"], num_partitions, config["alpha"], config["seed"])
    train, test = parts.train[partition_id], parts.test[partition_id]
    trainset, testset = Images(data.x_train[train], data.y_train[train]), Images(data.x_train[test], data.y_train[test])
    return DataLoader(trainset, config["batch-size"], shuffle=True), DataLoader(testset, config["batch-size"])


def load_central_testset(config):
    data = open_data(config["dataset"], config["data-dir"])
    return DataLoader(Images(data.x_test.copy(), data.y_test), batch_size=256)


def train(net, trainloader, epochs, lr, device):
    """Train the model and return its mean loss."""
    net.to(device).train()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    total = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = criterion(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(trainloader))


def test(net, testloader, device):
    """Return the model's mean loss and its accuracy."""
    net.to(device).eval()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in testloader:
            outputs, labels = net(images.to(device)), labels.to(device)
            loss += nn.functional.cross_entropy(outputs, labels, reduction="sum").item()
            correct += (outputs.argmax(1) == labels).sum().item()
    return loss / len(testloader.dataset), correct / len(testloader.dataset)
