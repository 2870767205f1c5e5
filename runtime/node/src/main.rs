//! `starling`: parse, run, exit.

use starling::cli::{self, Command, Exit, ModelCommand};
use std::io::{self, Write};
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match cli::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    let mut stdout = io::stdout();
    let done: io::Result<Exit> = match &cli.command {
        Command::Up(up) => Ok(starling::run::up(up)),
        Command::Serve(serve) => Ok(starling::run::serve(serve)),
        Command::Bench(bench) => Ok(starling::run::bench(bench)),
        Command::Calibrate(calibrate) => Ok(starling::run::calibrate(calibrate)),
        Command::Plan(plan) => Ok(starling::run::plan(plan)),
        Command::Nodes { admin } => Ok(starling::run::nodes(admin)),
        Command::Cert(cert) => Ok(starling::run::cert(&cert.command)),
        Command::Config(config) => config.command.run(&mut stdout),
        Command::Model(model) => match &model.command {
            ModelCommand::Fetch { name } => fetch(name, &mut stdout),
        },
        Command::Completions { shell } => {
            cli::write_completions(*shell, &mut stdout);
            Ok(Exit::Ok)
        }
        Command::Man { command } => cli::write_man(command.as_deref(), &mut stdout).map(|()| Exit::Ok),
    };
    match done {
        Ok(exit) => exit.into(),
        Err(error) => {
            eprintln!("error: {error}");
            Exit::Failed.into()
        }
    }
}

fn fetch(name: &str, out: &mut impl Write) -> io::Result<Exit> {
    match starling::fetch::model(name) {
        Ok(path) => {
            writeln!(out, "{}", path.display())?;
            Ok(Exit::Ok)
        }
        Err(error) => {
            eprintln!("error: {error}");
            Ok((&error).into())
        }
    }
}
