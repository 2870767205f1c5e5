//! Tables in Markdown.

pub struct Table {
    columns: usize,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(header: &[&str]) -> Self {
        Self { columns: header.len(), rows: vec![header.iter().map(|cell| (*cell).to_owned()).collect()] }
    }

    pub fn row(&mut self, cells: &[String]) {
        let empty = std::iter::repeat_n(String::new(), self.columns.saturating_sub(cells.len()));
        self.rows.push(cells.iter().cloned().chain(empty).collect());
    }

    /// Two times and their ratio, the first divided by the second.
    pub fn compared(&mut self, name: &str, (ours, theirs): (f64, f64), wanted: &str) {
        let cell = |value: f64| if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.2}") };
        self.row(&[name.to_owned(), cell(ours), cell(theirs), format!("{:.2}", ours / theirs), wanted.to_owned()]);
    }

    pub fn print(&self) {
        for (index, row) in self.rows.iter().enumerate() {
            println!("| {} |", row.join(" | "));
            if index == 0 {
                println!("|---|{}", "---:|".repeat(self.columns - 1));
            }
        }
        println!();
    }
}
